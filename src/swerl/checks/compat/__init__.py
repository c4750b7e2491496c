"""Check agents for compatibility: real agents, a scripted model, and the tokens they leave."""

"""How the weights of model lines correspond to Megatron-Core's parameters."""

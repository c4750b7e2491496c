"""Parts for swerl that live outside its repository."""

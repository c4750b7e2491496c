"""What a run will hold and take, told before it starts."""

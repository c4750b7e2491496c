"""What other trainers take of swerl: its rows as theirs, and its episodes as their rollouts."""

"""What a prompt has beside tokens: images, and the log-probabilities of its tokens."""

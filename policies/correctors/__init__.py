"""What corrects the output for the tokens that were evicted, one file each."""

"""What replaces the attention weights inside a score, one file each."""

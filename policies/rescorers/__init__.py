"""What replaces the scores once the budget is known, one file each."""

"""How slots are spread over layers or heads, one file each."""

"""Block stores, one file each."""

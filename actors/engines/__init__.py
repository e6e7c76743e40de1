"""Generation engines, one file each."""

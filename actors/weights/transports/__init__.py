"""Weight transports, one file each."""

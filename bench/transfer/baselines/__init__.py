"""What the stores are measured against: one file per other way to bring the same rows from process to process."""

"""What the notebooks record, ask and check."""

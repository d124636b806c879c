"""What sequences cost."""

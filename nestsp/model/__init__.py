"""The Hugging Face edge: an unmodified model, nestsp's attention in it, and the loss as a sum."""

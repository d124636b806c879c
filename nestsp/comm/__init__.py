"""Process groups of the tree, and the one exchange that attention needs."""

"""Process groups of the tree, and the communications that attention needs."""

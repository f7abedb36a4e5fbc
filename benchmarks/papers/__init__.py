"""Published results of the papers, computed again and set beside them."""

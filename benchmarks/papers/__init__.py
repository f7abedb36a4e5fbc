"""Published results of the papers, computed again and compared with them."""

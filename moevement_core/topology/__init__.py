"""Place of a rank among the others, and the channels between them."""

"""The pictures of rows, in the layouts in which the train backends compute them."""

"""Generation engines: their protocols, one module or folder for each engine, and the router over several of them."""

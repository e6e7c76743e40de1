"""Generation engines: their protocols, one module or folder for each engine, and a router over several engines."""

"""Router replay makes a model's routers use the experts that the engine chose, the same way in every train backend."""

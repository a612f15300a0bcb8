"""An HTTP server with OpenAI's interface: long answers that survive their client and their
server."""

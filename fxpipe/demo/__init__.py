"""The demo: a LLaVA learns to caption handwritten digits, in a pipeline and in eager."""

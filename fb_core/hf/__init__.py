"""Where transformers and peft are met."""

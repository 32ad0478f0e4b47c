"""What fits a transformers model: its facts, its checkpoint, its layers packed, its tokens. Only here peft is met."""

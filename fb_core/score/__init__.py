"""Log-probs of continuations behind one prefix, and the targets that they give."""

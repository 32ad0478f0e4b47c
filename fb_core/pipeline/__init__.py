"""The method's offline stages as functions: collect, futures, score, rollouts, evaluate (training is `fb_core.training`)."""

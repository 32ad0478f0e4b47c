"""The method's offline stages as functions; training is `fb_core.training`."""

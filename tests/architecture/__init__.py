"""Gates: the rules of CONTRIBUTING.md that nobody has to remember, each with a breach planted to test it."""

"""The OpenAI-compatible endpoint through which agents speak to the policy; it records each call's exact tokens."""

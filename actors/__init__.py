"""Ray actors of a run and what they host: engines, environments, rewards, rollout workers and train workers."""

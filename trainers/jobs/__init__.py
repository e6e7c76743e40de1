"""Jobs of schedulers that run a training on several hosts: Slurm's batch files and KubeRay's manifests."""

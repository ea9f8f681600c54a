"""Records, recipes, metrics, weight manifests and the run directory.

Nothing here imports torch, ray or vllm, so a recipe is validated and a run is audited in well under a second.
"""

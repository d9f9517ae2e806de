"""The bus at work on one host: a PyTorch trainer job, a tensor-parallel rollout job, verified refreshes between them.

    python -m tensorbus.quickstart --help

| Module | Does |
|---|---|
| `launcher` | starts daemon, agent and both jobs, shows progress, ends them, writes the report |
| `trainer` | one trainer rank: FSDP2, gloo, bf16, AdamW; publishes after every step |
| `sliced_trainer`, `megatron_layout` | a trainer rank with Megatron's tensor and pipeline parallel layout |
| `rollout` | one rollout rank: holds the shard an engine would hold, updates, verifies |
| `vllm_layout` | which part of which tensor fills which rows of an engine's fused buffers |
| `verify` | the same shards cut out of the full state by other code, compared element by element |
| `bus` | what the jobs need of the bus, as two small interfaces |
| `events`, `processes`, `leaks`, `report` | lines between processes; starting and ending them; memory that grows; HTML |
"""

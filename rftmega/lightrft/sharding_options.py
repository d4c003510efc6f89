"""Translation of LightRFT's DeepSpeed and FSDP options to overrides of an rftmega config."""

from typing import Any

# DeepSpeed's ZeRO stages (Rajbhandari et al., arXiv:1910.02054)
STAGES = {
    1: ("backend=megatron", "optimizer.distributed=true"),
    2: ("backend=fsdp", "parallel.reshard_after_forward=false"),
    3: ("backend=fsdp", "parallel.reshard_after_forward=true"),
}


def sharding_overrides(args: Any) -> list[str]:
    """Returns the overrides for `rftmega.config.load` that correspond to the options `args` of a
    LightRFT run.

    Reads `fsdp`, `zero_stage` (2 if missing), `fsdp_cpu_offload`, `adam_offload`, `bf16`,
    `gradient_checkpointing` and `sp_size`. Raises ValueError for a combination to which no rftmega
    options correspond.
    """
    given = vars(args)
    stage = 3 if given.get("fsdp") else given.get("zero_stage", 2)
    if stage not in STAGES:
        raise ValueError(
            f"zero_stage={stage} has no counterpart; DeepSpeed's stages are 1, 2 and 3. docs/backends.md says what "
            "each becomes."
        )
    found = list(STAGES[stage])
    on_fsdp = "backend=fsdp" in found
    for name in ("fsdp_cpu_offload", "adam_offload"):
        if given.get(name) and not on_fsdp:
            raise ValueError(
                f"{name} with zero_stage={stage}: Megatron's optimizer steps on the device. Take zero_stage 2 or 3, or fsdp."
            )
    if given.get("fsdp_cpu_offload") or given.get("adam_offload"):
        found.append("parallel.cpu_offload=true")
    sequence = given.get("sp_size", 1)
    if sequence > 1 and on_fsdp:
        raise ValueError(
            f"sp_size={sequence} with backend=fsdp: one process computes a whole row there. Take zero_stage=1, which means "
            "Megatron, where it becomes parallel.context."
        )
    if sequence > 1:
        found.append(f"parallel.context={sequence}")
    if "bf16" in given:
        found.append(f"model.dtype={'bfloat16' if given['bf16'] else 'float32'}")
    if given.get("gradient_checkpointing"):
        found.append("parallel.recompute=full")
    return found

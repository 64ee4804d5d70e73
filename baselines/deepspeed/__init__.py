"""DeepSpeed's systems: ZeRO-2, ZeRO-3, and what builds on them, all with an offloaded optimizer."""

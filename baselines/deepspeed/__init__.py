"""The systems that DeepSpeed has: ZeRO-2 and ZeRO-3 with their optimizer offloaded, and what builds
on these."""

"""What a step would cost on a machine, in bytes and seconds, and which placement to take. The
engine's core does not import it."""

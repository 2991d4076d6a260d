/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * PyTorch: calls that only a training loop makes. They are C++, so nobody waits for their return.
 */
enum torch_role {
	TORCH_BACKWARD,
	TORCH_OPTIMIZER,
	TORCH_AWAIT_PEERS,
	TORCH_AWAIT_GRADIENTS,
};

static __always_inline void torch_mark(const struct zernel_symbol *symbol,
				       struct zernel_thread *thread,
				       struct zernel_process *process, __u64 now_ns)
{
	/* With a GPU that is mostly NCCL's, whose waits do not block; and who calls is not the thread of the
	 * training loop, but one that idles afterwards. */
	if (symbol->role == TORCH_AWAIT_GRADIENTS && process->device != ZERNEL_NO_GPU)
		return;
	thread->run.steps = true;
	if (process->flags & ZERNEL_IS_LOADER)
		zernel_is_trainer(process);
	if (symbol->role == TORCH_AWAIT_PEERS || symbol->role == TORCH_AWAIT_GRADIENTS)
		await_peers(thread, now_ns);
}

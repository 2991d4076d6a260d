/* SPDX-License-Identifier: GPL-2.0-only */
/* State of the cuda_module probe: loads of GPU code by a process. */
#ifndef CUDA_MODULE_STATE_BPF_H
#define CUDA_MODULE_STATE_BPF_H

#include "kernel.h"

struct cuda_module_process {
	__u64 loads;
};

#endif

// Every kernel; what instances.inc needs to be included before it.
#pragma once

#include "sycl/kernels/add_rms_norm.hpp"
#include "sycl/kernels/block_attention.hpp"
#include "sycl/kernels/block_conv.hpp"
#include "sycl/kernels/cache_append.hpp"
#include "sycl/kernels/heads.hpp"
#include "sycl/kernels/path_select.hpp"
#include "sycl/kernels/path_tree.hpp"
#include "sycl/kernels/path_viterbi.hpp"
#include "sycl/kernels/reject_sample.hpp"
#include "sycl/kernels/round_commit.hpp"
#include "sycl/kernels/swiglu.hpp"

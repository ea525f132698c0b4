// What the parts of making an executor's steps share.
#pragma once

#include <string>

#include "cuda_executor.hpp"

namespace uncut::cuda {

inline constexpr unsigned threads_per_block = 256;

[[noreturn]] inline void refuse(const Operation &operation, const std::string &what) {
    throw Failure("task " + std::to_string(operation.task) + " cannot run on a CUDA device: " + what);
}

inline Address address_of(const Program &program, const Operand &operand) {
    return static_cast<Address>(program.addresses[operand.buffer]) + static_cast<Address>(operand.offset);
}

inline bool transposes(const Program &program, const Operation &copy) {
    return program.operands[copy.first_operand + copy.num_operands - 1].op != 0;
}

}  // namespace uncut::cuda

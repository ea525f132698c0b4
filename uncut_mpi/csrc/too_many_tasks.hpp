// How a scheduler ends that would make more tasks than it may.
#pragma once

#include <stdexcept>

namespace uncut {

struct TooManyTasks : std::runtime_error {
    TooManyTasks() : std::runtime_error("too many tasks") {}
};

}  // namespace uncut

// The tables of a schedule of tiles as Python takes them.
#pragma once

#include <nanobind/nanobind.h>

#include "uncut_scheduler.hpp"

namespace uncut {

// (tasks, operands, regions, awaits, lanes, caches, end).
nanobind::tuple as_arrays(Tables &&tables);

}  // namespace uncut

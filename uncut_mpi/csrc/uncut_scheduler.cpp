#include <nanobind/nanobind.h>
namespace uncut {
void bind_uncut_scheduler(nanobind::module_ &) {}
}  // namespace uncut

// Waiting that leaves the core to its other thread for a while.
#pragma once

namespace uncut {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace uncut

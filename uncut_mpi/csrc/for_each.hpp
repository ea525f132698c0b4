// FOR_EACH(MACRO, of, first, second, …) is MACRO(of, first) MACRO(of, second) …, so that a table names each field once.
// The preprocessor has no loops: what a macro leaves over is scanned again, here up to 256 times.
#pragma once

#define FOR_EACH(macro, of, ...) __VA_OPT__(FOR_EACH_SCAN(FOR_EACH_STEP(macro, of, __VA_ARGS__)))
#define FOR_EACH_STEP(macro, of, name, ...)                                                                            \
    macro(of, name) __VA_OPT__(FOR_EACH_AGAIN FOR_EACH_PARENTHESES(macro, of, __VA_ARGS__))
#define FOR_EACH_AGAIN() FOR_EACH_STEP
#define FOR_EACH_PARENTHESES ()
#define FOR_EACH_SCAN(...) FOR_EACH_SCAN_3(FOR_EACH_SCAN_3(FOR_EACH_SCAN_3(FOR_EACH_SCAN_3(__VA_ARGS__))))
#define FOR_EACH_SCAN_3(...) FOR_EACH_SCAN_2(FOR_EACH_SCAN_2(FOR_EACH_SCAN_2(FOR_EACH_SCAN_2(__VA_ARGS__))))
#define FOR_EACH_SCAN_2(...) FOR_EACH_SCAN_1(FOR_EACH_SCAN_1(FOR_EACH_SCAN_1(FOR_EACH_SCAN_1(__VA_ARGS__))))
#define FOR_EACH_SCAN_1(...) __VA_ARGS__

// Part of the library in wheels only, so that what is compiled on a newer system also loads on an older one: what its
// headers ask of newer versions of glibc (pow, __libc_single_threaded) and of libstdc++ (the others) is defined here.
// `make wheels` checks that nothing is missing.
#include <new>
#include <sstream>

#define CHUNKMEM_AS(symbol) __asm__(symbol) __attribute__((visibility("hidden")))

extern "C" {
double chunkmem_pow_of_glibc(double base, double exponent);
__asm__(".symver chunkmem_pow_of_glibc, pow@GLIBC_2.2.5");

double chunkmem_pow(double base, double exponent) CHUNKMEM_AS("pow");
double chunkmem_pow(double base, double exponent) { return chunkmem_pow_of_glibc(base, exponent); }

extern char chunkmem_is_single_threaded CHUNKMEM_AS("__libc_single_threaded");
char chunkmem_is_single_threaded = 0;

[[noreturn]] void chunkmem_throw_bad_length() CHUNKMEM_AS("_ZSt28__throw_bad_array_new_lengthv");
void chunkmem_throw_bad_length() { throw std::bad_array_new_length(); }
}

template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

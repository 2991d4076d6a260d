/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Types that userspace mirrors. The compiler describes only types that an object uses: an enum
 * whose constants are used and nothing else is missing from the object's BTF. ZERNEL_IN_BTF() puts
 * a type there, so that a test can compare the Rust mirror with it. It costs a few bytes of
 * read-only data and no instruction.
 */
#ifndef ZERNEL_BTF_H
#define ZERNEL_BTF_H

/* `kind` is struct or enum. */
#define ZERNEL_IN_BTF(kind, name) const volatile kind name name##_in_btf = {}

#endif

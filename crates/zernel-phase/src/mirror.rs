//! Rust mirrors of the types in the BPF headers.
//!
//! The C headers are the definition. [`mirrors!`](crate::mirrors) declares the Rust side and, from the same text, a
//! [`Mirrors`] list of names, sizes, offsets and values. A test of `zernel-ebpf` compares that list with the BTF of the
//! compiled objects, so that neither side can change alone.

/// A struct that has the layout of a struct in C.
#[derive(Debug, Clone, Copy)]
pub struct StructMirror {
    /// Its name in C.
    pub c_name: &'static str,
    /// Its size in bytes.
    pub size: usize,
    /// The names and offsets of its fields.
    pub fields: &'static [(&'static str, usize)],
}

/// Numbers that are constants of an enum in C.
#[derive(Debug, Clone, Copy)]
pub struct EnumMirror {
    /// The name of the enum in C.
    pub c_name: &'static str,
    /// The names and values of its constants.
    pub values: &'static [(&'static str, i64)],
    /// Whether these are all of its constants. Flags that only the kernel uses need no mirror.
    pub is_complete: bool,
}

/// All mirrors of one module.
#[derive(Debug, Clone, Copy)]
pub struct Mirrors {
    /// Structs.
    pub structs: &'static [StructMirror],
    /// Enums, flags and limits.
    pub enums: &'static [EnumMirror],
}

/// Declares mirrors of C types and a [`Mirrors`](crate::mirror::Mirrors) list of them. Every section may be left out.
///
/// - `structs`: structs of plain integers without padding. Attributes and doc comments of structs and fields are kept.
/// - `constants`: constants of the module, named like those of the C enum less a prefix.
/// - `flags`: the same as associated constants of a type; constants that only the kernel uses may be left out.
/// - `variants`: enums that are declared elsewhere. Each variant has its C constant; other C constants follow in
///   `and`. A variant that is not listed does not compile.
/// - `numbers`: any other numbers.
#[macro_export]
macro_rules! mirrors {
    (
        $(#[$list_attribute:meta])* $list_visibility:vis const $list:ident;
        $(structs { $(
            $(#[$attribute:meta])* $visibility:vis struct $name:ident = $kernel:literal {
                $($(#[$field_attribute:meta])* $field:ident: $type:ty,)*
            }
        )* })?
        $(constants { $(
            $constant_visibility:vis $constant_type:ty = $constant_kernel:literal, $prefix:literal {
                $($(#[$constant_attribute:meta])* $constant:ident = $value:expr,)*
            }
        )* })?
        $(flags { $(
            impl $owner:ident: $flag_type:ty = $flag_kernel:literal, $flag_prefix:literal {
                $($(#[$flag_attribute:meta])* $flag:ident = $flag_value:expr,)*
            }
        )* })?
        $(variants { $(
            enum $enum:ident = $enum_kernel:literal {
                $($variant:ident = $variant_name:literal,)*
            } $(and { $($other_name:literal = $other_value:expr,)* })?
        )* })?
        $(numbers { $(
            $number_kernel:literal { $($number_name:literal = $number_value:expr,)* }
        )* })?
    ) => {
        $($(
            $(#[$attribute])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq)]
            #[derive(
                ::zerocopy::FromBytes,
                ::zerocopy::IntoBytes,
                ::zerocopy::Immutable,
                ::zerocopy::KnownLayout
            )]
            #[repr(C)]
            #[allow(missing_docs)] // otherwise documented in the C header
            $visibility struct $name { $($(#[$field_attribute])* pub $field: $type,)* }
        )*)?

        $($($(
            $(#[$constant_attribute])*
            #[allow(dead_code)] // complete, for the comparison
            $constant_visibility const $constant: $constant_type = $value;
        )*)*)?

        $($(
            #[allow(dead_code)] // complete, for the comparison
            impl $owner { $(
                $(#[$flag_attribute])*
                pub const $flag: $flag_type = $flag_value;
            )* }
        )*)?

        // Does not compile if a variant is missing.
        $($(const _: fn($enum) = |value| match value { $($enum::$variant => (),)* };)*)?

        $(#[$list_attribute])*
        $list_visibility const $list: $crate::mirror::Mirrors = $crate::mirror::Mirrors {
            structs: &[$($(
                $crate::mirror::StructMirror {
                    c_name: $kernel,
                    size: size_of::<$name>(),
                    fields: &[$((stringify!($field), ::std::mem::offset_of!($name, $field)),)*],
                },
            )*)?],
            enums: &[
                $($($crate::mirror::EnumMirror {
                    c_name: $constant_kernel,
                    values: &[$((concat!($prefix, stringify!($constant)), $constant as i64),)*],
                    is_complete: true,
                },)*)?
                $($($crate::mirror::EnumMirror {
                    c_name: $flag_kernel,
                    values: &[$((concat!($flag_prefix, stringify!($flag)), $owner::$flag as i64),)*],
                    is_complete: false,
                },)*)?
                $($($crate::mirror::EnumMirror {
                    c_name: $enum_kernel,
                    values: &[
                        $(($variant_name, $enum::$variant as i64),)*
                        $($(($other_name, $other_value as i64),)*)?
                    ],
                    is_complete: true,
                },)*)?
                $($($crate::mirror::EnumMirror {
                    c_name: $number_kernel,
                    values: &[$(($number_name, $number_value as i64),)*],
                    is_complete: true,
                },)*)?
            ],
        };
    };
}

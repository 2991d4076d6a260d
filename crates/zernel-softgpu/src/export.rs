//! [`exports!`](crate::exports): how the shared libraries declare their C functions.

use std::ffi::c_char;

/// A type that the body of an exported function may return, and that has a C equivalent.
pub trait ReturnValue {
    /// The type that the C function returns.
    type Raw;
    /// The value that the C function returns, and the result code for the truth log.
    fn into_raw(self) -> (Self::Raw, i32);
}

impl<E: Into<i32>> ReturnValue for Result<(), E> {
    type Raw = i32;
    fn into_raw(self) -> (i32, i32) {
        let code = self.map_or_else(Into::into, |()| 0);
        (code, code)
    }
}

impl ReturnValue for *const c_char {
    type Raw = *const c_char;
    fn into_raw(self) -> (*const c_char, i32) {
        (self, 0)
    }
}

/// An exported function: its name and its address.
#[derive(Debug, Clone, Copy)]
pub struct Export {
    /// The name of the function in the dynamic symbol table.
    pub name: &'static str,
    /// The address of the exported symbol.
    pub address: fn() -> usize,
}

/// Declares exported C functions: for each its name, signature and body.
///
/// `exports! { "library" => fn name(call, argument: Type, ...) -> Outcome { body } ... }` makes for
/// each function the exported symbol, its entry in the truth log, and its entry in `EXPORTS`. `call`
/// names the [`OpenCall`](crate::truth::OpenCall) in the body. `per_thread(other)` before
/// `fn` exports the same body a second time under the other name, for the per-thread default stream.
///
/// The exported symbol is a stub that jumps to the body. On x86-64 the stub starts with `push`, an instruction that the
/// kernel emulates for an uprobe instead of single-stepping it. The stub leaves the stack as it found it, so arguments
/// on the stack stay where the body expects them. It is [`STUB_BYTES`] long, so that [`install`](crate::install) can
/// overwrite it with another prologue.
///
/// [`STUB_BYTES`]: crate::install::STUB_BYTES
#[macro_export]
macro_rules! exports {
    ($library:literal => $(
        $(#[$attribute:meta])*
        $(per_thread($per_thread:ident))? fn $name:ident $parameters:tt -> $returned:ty $body:block
    )*) => {
        /// The functions of this module that the library exports.
        pub(crate) const EXPORTS: &[$crate::export::Export] = &[
            $(
                $crate::exports!(@export $name),
                $($crate::exports!(@export $per_thread),)?
            )*
        ];
        $(
            $(#[$attribute])*
            #[allow(non_snake_case)]
            mod $name {
                #[allow(clippy::wildcard_imports, unused_imports)]
                use super::*;
                $crate::exports!(@body $parameters $returned, $body);
                $crate::exports!(@entry $parameters $returned, $library, $name, false);
            }
            $crate::exports!(@stub $parameters $returned, $name);
            $(
                #[allow(non_snake_case)]
                mod $per_thread {
                    #[allow(clippy::wildcard_imports, unused_imports)]
                    use super::*;
                    use super::$name::body;
                    $crate::exports!(@entry $parameters $returned, $library, $per_thread, true);
                }
                $crate::exports!(@stub $parameters $returned, $per_thread);
            )?
        )*
    };
    (@export $name:ident) => {
        $crate::export::Export { name: stringify!($name), address: || $name as *const () as usize }
    };
    (@body ($call:ident $(, $argument:ident : $type:ty)* $(,)?) $returned:ty, $body:block) => {
        #[allow(clippy::too_many_arguments, clippy::needless_pass_by_value, clippy::unnecessary_wraps)]
        pub(super) fn body($call: &mut $crate::truth::OpenCall, $($argument: $type),*) -> $returned $body
    };
    (
        @entry ($call:ident $(, $argument:ident : $type:ty)* $(,)?) $returned:ty,
        $library:literal, $name:ident, $per_thread:literal
    ) => {
        static SYMBOL: $crate::truth::LoggedSymbol =
            $crate::truth::LoggedSymbol::new($library, stringify!($name));
        #[allow(clippy::too_many_arguments)]
        pub(super) extern "C" fn entry(
            $($argument: $type),*
        ) -> <$returned as $crate::export::ReturnValue>::Raw {
            let mut call = $crate::truth::OpenCall::enter_call(&SYMBOL, $per_thread);
            let returned = body(&mut call, $($argument),*);
            let (raw, code) = $crate::export::ReturnValue::into_raw(returned);
            call.leave_call(code);
            raw
        }
    };
    (@stub ($call:ident $(, $argument:ident : $type:ty)* $(,)?) $returned:ty, $name:ident) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        extern "C" fn $name($($argument: $type),*) -> <$returned as $crate::export::ReturnValue>::Raw {
            core::arch::naked_asm!(
                "push rbp",
                "pop rbp",
                "jmp {entry}",
                ".fill 9, 1, 0xcc",
                entry = sym self::$name::entry,
            )
        }
        #[cfg(not(target_arch = "x86_64"))]
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        extern "C" fn $name($($argument: $type),*) -> <$returned as $crate::export::Returned>::Raw {
            self::$name::entry($($argument),*)
        }
    };
}

//! Types for arguments that a C caller passes: pointers that may be null and are checked before use.
//!
//! Rust code can create these types only from a pointer in an `unsafe` block. An argument of an exported
//! function comes from C, and the C caller promises what every C API needs: a pointer is null, or it points
//! to what the documentation requires.

use std::ffi::{CStr, c_char};

/// The C caller passed a null pointer where the function needs a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NullPointer;

/// An output argument: the place in the caller's memory where the function stores a result.
#[derive(Debug)]
#[repr(transparent)]
pub struct OutArgument<T>(*mut T);

// SAFETY: the C caller must not use the place of a result before it is stored, and any thread may store it.
unsafe impl<T: Send> Send for OutArgument<T> {}

impl<T> OutArgument<T> {
    /// Stores `value` at the caller's place; an error if the pointer is null.
    pub fn set(&self, value: T) -> Result<(), NullPointer> {
        self.set_at(0, value)
    }

    /// Stores `value` if the caller passed a place for it.
    pub fn set_unless_null(&self, value: T) {
        // A null pointer means that the caller does not want the value.
        let _ = self.set(value);
    }

    /// Stores `value` as element `index` of the caller's array.
    pub fn set_at(&self, index: usize, value: T) -> Result<(), NullPointer> {
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: not null, so by the C caller's promise it has room for the elements it announced.
        unsafe { self.0.add(index).write(value) };
        Ok(())
    }

    /// Whether the C caller passed null.
    #[must_use]
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }
}

impl<T: Copy> OutArgument<T> {
    /// Reads the value that the caller stored at this place, for an argument that is both input and output.
    pub fn get(&self) -> Result<T, NullPointer> {
        InArgument(self.0.cast_const()).get()
    }
}

impl OutArgument<c_char> {
    /// Stores `text` and a terminating zero in a buffer of `capacity` bytes. A longer text is truncated.
    /// Returns whether the whole text fitted.
    pub fn set_text(&self, text: &str, capacity: usize) -> Result<bool, NullPointer> {
        let room = capacity.saturating_sub(1);
        for (index, byte) in text.bytes().take(room).enumerate() {
            self.set_at(index, byte.cast_signed())?;
        }
        if capacity > 0 {
            self.set_at(text.len().min(room), 0)?;
        }
        Ok(text.len() <= room)
    }
}

/// An input argument: a pointer to one value, or to the first value of an array.
#[derive(Debug)]
#[repr(transparent)]
pub struct InArgument<T>(*const T);

impl<T> Clone for InArgument<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for InArgument<T> {}

impl<T: Copy> InArgument<T> {
    /// Wraps a pointer that was found inside another argument.
    ///
    /// # Safety
    /// As for any pointer from C: null, or valid for reads of what it is documented to point to.
    #[must_use]
    pub unsafe fn new(pointer: *const T) -> Self {
        Self(pointer)
    }

    /// Reads the value that the pointer refers to.
    pub fn get(self) -> Result<T, NullPointer> {
        self.get_at(0)
    }

    /// Reads element `index` of the caller's array.
    pub fn get_at(self, index: usize) -> Result<T, NullPointer> {
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: not null, so by the C caller's promise it points to the elements it announced;
        // unaligned, because parameter buffers are packed by hand.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// The same address as a pointer to a value of type `U`.
    #[must_use]
    pub fn cast<U>(self) -> InArgument<U> {
        InArgument(self.0.cast())
    }

    /// Whether the C caller passed null.
    #[must_use]
    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The pointer itself, unchecked.
    #[must_use]
    pub fn pointer(self) -> *const T {
        self.0
    }
}

/// An input argument that is a zero-terminated string.
#[derive(Debug)]
#[repr(transparent)]
pub struct TextArgument(*const c_char);

impl TextArgument {
    /// Copies the string; bytes that are not UTF-8 are replaced.
    pub fn get(&self) -> Result<String, NullPointer> {
        if self.0.is_null() {
            return Err(NullPointer);
        }
        // SAFETY: not null, so by the C caller's promise it is a zero-terminated string.
        let text = unsafe { CStr::from_ptr(self.0) };
        Ok(text.to_string_lossy().into_owned())
    }
}
